"""Step 1/2: build the telephone."""
