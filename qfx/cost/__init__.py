"""What int8 and float take on this machine: tables of measured times, and what they predict."""
