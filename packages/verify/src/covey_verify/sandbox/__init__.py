"""Running untrusted code and judging untrusted text: killable children that can touch nothing.

`confine`, `seccomp` what a child gives up · `server`, `driver` the fork server and its children ·
`client` the way to it · `process`, `portable` the backends · `probe` their test · `choice` which one.
"""
