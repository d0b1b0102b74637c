"""Parts of HTML reports: plan, profile and report write their pages with them."""
