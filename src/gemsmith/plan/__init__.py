"""Memory, time and cost of a recipe on each machine by formula, before anything is rented. No ML library is used."""

from gemsmith.plan.stage import plan, plan_only, plan_recipe, plan_run

__all__ = ["plan", "plan_only", "plan_recipe", "plan_run"]
