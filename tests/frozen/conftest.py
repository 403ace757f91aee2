"""What was released has tests of its own, which run where its packages are installed."""

collect_ignore_glob = ["release_*"]
