"""`covey migrate`: configs of other trainers as configs of covey. Nothing else imports this room."""
