"""Our experts inside other libraries' models. Each module here needs its library; nothing else imports them."""
