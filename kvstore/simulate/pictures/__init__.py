"""What was simulated, to look at: one page that needs nothing else, or PNG files. All from the rows that JSON has."""
