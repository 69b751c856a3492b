"""Many ranks: who must agree, who must be alike, and where among them a bad value began."""
