"""Lesson 10."""
