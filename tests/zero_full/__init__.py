"""Tests of the production package."""
