"""Rewards without a judge: rules, users' functions; and how several producers' outcomes become one."""
