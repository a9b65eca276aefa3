"""Images as the engine knows them: how they are set up."""
