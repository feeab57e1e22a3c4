"""Tool calls as models write them: their forms, their arguments, and the turns that they end."""
