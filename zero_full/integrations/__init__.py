"""Integrations with other libraries. Nothing of this package is imported unless a program asks for it."""
