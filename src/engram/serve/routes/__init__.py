"""The routes of the server, by subject. What a route does is in the modules beside this package."""
