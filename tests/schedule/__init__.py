"""Tests of schedules as data."""
