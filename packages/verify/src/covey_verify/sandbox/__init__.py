"""The sandbox, which runs untrusted code and judges untrusted text in killable children without rights.

`confine`, `seccomp` the rights that a child gives up · `server`, `driver` the fork server and its children ·
`client` the access to it · `process`, `portable` the backends · `probe` their test · `choice` their
selection.
"""
