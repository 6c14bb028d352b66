"""Campaigns against real coordinator processes: killed, frozen, overrun, with workers that know what was promised."""
