"""The Gaudi backend; its facts can be imported without torch."""
