"""This package's experts in models of other libraries. Each module imports its library, and nothing else imports the
module."""
