"""The loop that schedules steps and runs them, its commands and its reports."""
