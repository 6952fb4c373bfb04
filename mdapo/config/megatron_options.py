def check_options(config): return []
