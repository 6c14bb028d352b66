"""One module for each page of the dashboard; each declares its `ROUTES`."""
