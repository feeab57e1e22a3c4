"""The pages: runs, groups and tokens in a browser, and the lab. They only read."""
