"""Commands that give one model an order, and wait for it: one module a command, and `order` that they share."""
