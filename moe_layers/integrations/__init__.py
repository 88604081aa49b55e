"""This package's experts in models of other libraries. Each module needs its library; nothing else imports it."""
