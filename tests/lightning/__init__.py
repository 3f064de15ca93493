"""Lightning's Trainer and Fabric with zero_full's strategies."""
