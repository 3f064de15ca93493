"""Lesson 0."""
