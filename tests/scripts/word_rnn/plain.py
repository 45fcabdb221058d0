# SPDX-License-Identifier: BSD-3-Clause
"""A word language model: an LSTM, batches cut by hand from one long text, and annealing.

The hidden state is carried from one batch to the next. When the validation loss doesn't improve,
the learning rate is divided by four. At the end, the best model is loaded again and tested.
"""

import argparse
import json
import math

import torch
from torch import nn

SENTENCES = {
    "start": ["the noun verbs", "a noun verbs"],
    "noun": ["cat", "dog", "child", "bird", "teacher"],
    "verbs": ["sees the noun eos", "sleeps eos", "follows a noun adverb eos", "sings adverb eos"],
    "adverb": ["slowly", "often", "at night"],
}


def make_text(words, generator):
    """Write sentences of a small grammar."""

    def expand(word):
        if word not in SENTENCES:
            return [word]
        choices = SENTENCES[word]
        chosen = choices[torch.randint(len(choices), (), generator=generator)]
        return [leaf for part in chosen.split() for leaf in expand(part)]

    text = []
    while len(text) < words:
        text += expand("start")
    return text[:words]


class Dictionary:
    def __init__(self):
        self.word2idx = {}

    def encode(self, text):
        return torch.tensor([self.word2idx.setdefault(word, len(self.word2idx)) for word in text])


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid, self.ntoken = nlayers, nhid, ntoken

    def forward(self, inputs, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(inputs)), hidden)
        return self.decoder(self.drop(output)).view(-1, self.ntoken), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        shape = (self.nlayers, bsz, self.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(hidden):
    return tuple(h.detach() for h in hidden)


def get_batch(source, i, bptt):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(model, criterion, source, bptt):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(source.size(1))
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i, bptt)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


def train(model, criterion, optimizer, source, args):
    model.train()
    total_loss, batches = 0.0, 0
    hidden = model.init_hidden(source.size(1))
    for i in range(0, source.size(0) - 1, args.bptt):
        data, targets = get_batch(source, i, args.bptt)
        hidden = repackage_hidden(hidden)
        model.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += loss.item()
        batches += 1
        if batches % args.log_interval == 0:
            mean = total_loss / batches
            print(f"| {batches:5d} batches | loss {mean:5.2f} | ppl {math.exp(mean):8.2f}")
    return batches


def main():
    parser = argparse.ArgumentParser(description="RNN language model")
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--bptt", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1111)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save", default="model.pt")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    dictionary = Dictionary()
    train_data = batchify(dictionary.encode(make_text(6000, generator)), args.batch_size)
    val_data = batchify(dictionary.encode(make_text(1200, generator)), args.batch_size)
    test_data = batchify(dictionary.encode(make_text(1200, generator)), args.batch_size)

    model = RNNModel(len(dictionary.word2idx), ninp=24, nhid=48, nlayers=1, dropout=0.1)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    best_val_loss, val_losses, batches, checkpoints = None, [], [], 0
    for epoch in range(1, args.epochs + 1):
        batches.append(train(model, criterion, optimizer, train_data, args))
        val_losses.append(evaluate(model, criterion, val_data, args.bptt))
        print(f"| end of epoch {epoch:3d} | valid ppl {math.exp(val_losses[-1]):8.2f}")
        if best_val_loss is None or val_losses[-1] < best_val_loss:
            torch.save(model.state_dict(), args.save)
            best_val_loss = val_losses[-1]
            checkpoints += 1
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4.0

    model.load_state_dict(torch.load(args.save))
    test_loss = evaluate(model, criterion, test_data, args.bptt)
    print(f"| End of training | test ppl {math.exp(test_loss):8.2f}")
    facts = {
        "epochs": epoch,
        "batches": batches,
        "validations": len(val_losses),
        "checkpoints": checkpoints,
        "best_loss": best_val_loss,
        "loss_of_best": evaluate(model, criterion, val_data, args.bptt),
        "perplexity": math.exp(test_loss),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
