"""Grades a folder of hand-ins: exercises run again, answers from tables, tables from records, training replayed."""
