"""What every HTTP server of Strata shares: who calls, bodies, declarations, errors, the document, the process."""
