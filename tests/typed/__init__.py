"""Programs of users as a type checker sees them; `nox -s types` checks them, and nothing runs them."""
