"""Lesson 5."""
