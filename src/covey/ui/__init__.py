"""What people see beyond the console: tables of algorithms and, later, pages."""
