"""Clients of the package that only the command line imports: calibration, the doctor, and chats in a terminal."""
