"""DeepSpeed's sequences divided between ranks: names that scripts import."""
