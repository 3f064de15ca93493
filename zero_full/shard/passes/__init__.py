"""Forward and backward passes: hooks that all-gather and release parameters and reduce gradients."""
