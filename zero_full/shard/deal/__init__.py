"""From a model to what is sharded: which parameters lie together, and where they wait."""
