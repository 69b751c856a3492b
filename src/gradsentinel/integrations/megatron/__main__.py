"""`python -m gradsentinel.integrations.megatron SCRIPT ...`: runs a training script as it is, watched."""

from gradsentinel.integrations.megatron.launch import main

if __name__ == "__main__":
    main()
