# SPDX-License-Identifier: BSD-3-Clause
"""A sequence classifier: accumulation, bfloat16, clipping, linear warm-up and a cosine."""

import argparse
import json
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


def parse_args():
    parser = argparse.ArgumentParser(description="Train a sequence classifier")
    parser.add_argument("--per-device-train-batch-size", type=int, default=16)
    parser.add_argument("--per-device-eval-batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--num-train-epochs", type=int, default=4)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--warmup-ratio", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Reviews(Dataset):
    """Sequences of words; the label says whether good words outnumber bad words."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.examples = []
        for _ in range(count):
            length = int(torch.randint(8, 17, (), generator=generator))
            words = torch.randint(1, 30, (length,), generator=generator)
            score = int(((words < 8).sum() - ((words >= 8) & (words < 15)).sum()).item())
            self.examples.append({"input_ids": words, "label": int(score > 0)})

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def collate(examples):
    """Pad the sequences to the longest of the batch."""
    words = [example["input_ids"] for example in examples]
    input_ids = nn.utils.rnn.pad_sequence(words, batch_first=True)
    labels = torch.tensor([example["label"] for example in examples])
    return {"input_ids": input_ids, "attention_mask": input_ids > 0, "labels": labels}


class Classifier(nn.Module):
    def __init__(self, vocabulary=30, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask, labels):
        x = self.layer(self.embeddings(input_ids), src_key_padding_mask=~attention_mask)
        weights = attention_mask[:, :, None].to(x.dtype)
        logits = self.classifier((x * weights).sum(1) / weights.sum(1))
        return F.cross_entropy(logits.float(), labels), logits


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return current_step / max(1, num_warmup_steps)
        progress = (current_step - num_warmup_steps) / (num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))

    return LambdaLR(optimizer, lr_lambda)


@torch.no_grad()
def evaluate(model, eval_dataloader):
    model.eval()
    correct = total = 0
    for batch in eval_dataloader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, logits = model(**batch)
        correct += (logits.argmax(-1) == batch["labels"]).sum().item()
        total += len(batch["labels"])
    return correct / total


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    train_dataloader = DataLoader(
        Reviews(960, seed=1),
        shuffle=True,
        collate_fn=collate,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(
        Reviews(320, seed=2), collate_fn=collate, batch_size=args.per_device_eval_batch_size
    )
    model = Classifier()
    no_decay = ("bias", "norm1.weight", "norm2.weight")
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not n.endswith(no_decay)],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * updates_per_epoch
    warmup_steps = int(args.warmup_ratio * max_train_steps)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, max_train_steps)

    accuracies, completed_steps = [], 0
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, _ = model(**batch)
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            is_last = step == len(train_dataloader) - 1
            if (step + 1) % args.gradient_accumulation_steps == 0 or is_last:
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                if completed_steps % 10 == 0:
                    rate = lr_scheduler.get_last_lr()[0]
                    print(f"step {completed_steps}: loss {2 * loss.item():.4f}, lr {rate:.2e}")
        accuracies.append(evaluate(model, eval_dataloader))
        print(f"epoch {epoch}: accuracy {accuracies[-1]:.4f}")
        torch.save(model.state_dict(), f"epoch_{epoch}.pt")

    facts = {
        "epochs": epoch + 1,
        "validations": len(accuracies),
        "checkpoints": epoch + 1,
        "max_train_steps": max_train_steps,
        "scheduler_steps": lr_scheduler.last_epoch,
        "lr": lr_scheduler.get_last_lr()[0],
        "accuracy": accuracies[-1],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
