"""Values that users create and all of qfx reads: schemes, configurations, recipes."""
