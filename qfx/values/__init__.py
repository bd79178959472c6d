"""Values that users make and every room reads: schemes, configurations, recipes."""
