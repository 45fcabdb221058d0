# SPDX-License-Identifier: BSD-3-Clause
"""A graph convolutional network: every epoch is one step over the whole graph."""

import argparse
import json

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        self.bias = nn.Parameter(torch.zeros(output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.mm(adj_mat, torch.mm(input_tensor, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, dropout_p=0.3):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim)
        self.gc2 = GraphConv(hidden_dim, output_dim)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, adj_mat):
        x = self.dropout(F.relu(self.gc1(input_tensor, adj_mat)))
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)


def load_graph(nodes, communities, generator):
    """Nodes of one community are often connected, others rarely; features are very noisy."""
    labels = torch.arange(nodes) % communities
    same = labels[:, None] == labels[None, :]
    edges = torch.rand(nodes, nodes, generator=generator) < torch.where(same, 0.08, 0.01)
    adj = (edges | edges.T).float().fill_diagonal_(1.0)
    scale = adj.sum(1).rsqrt()
    features = F.one_hot(labels, communities).float().repeat(1, 4)
    features += 2.0 * torch.randn(features.shape, generator=generator)
    return features, labels, scale[:, None] * adj * scale[None, :]


def train_iter(epoch, model, optimizer, graph, masks, args):
    features, labels, adj = graph
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[masks["train"]], labels[masks["train"]])
    loss.backward()
    optimizer.step()
    if epoch % args.val_every == 0:
        val_loss, val_accuracy = test(model, graph, masks["val"])
        print(f"Epoch: {epoch:04d} val_loss: {val_loss:.4f} val_accuracy: {val_accuracy:.4f}")
        return val_accuracy
    return None


@torch.no_grad()
def test(model, graph, mask):
    features, labels, adj = graph
    model.eval()
    output = model(features, adj)[mask]
    accuracy = (output.argmax(1) == labels[mask]).float().mean().item()
    return F.nll_loss(output, labels[mask]).item(), accuracy


def main():
    parser = argparse.ArgumentParser(description="Graph convolutional network")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--val-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    graph = load_graph(400, 5, torch.Generator().manual_seed(args.seed))
    order = torch.randperm(400)
    masks = {"train": order[:60], "val": order[60:200], "test": order[200:]}
    model = GCN(20, 16, 5)
    optimizer = Adam(model.parameters(), lr=args.lr, weight_decay=args.l2)

    validations = []
    for epoch in range(1, args.epochs + 1):
        accuracy = train_iter(epoch, model, optimizer, graph, masks, args)
        if accuracy is not None:
            validations.append(accuracy)

    loss, accuracy = test(model, graph, masks["test"])
    print(f"Test set results: loss {loss:.4f} accuracy {accuracy:.4f}")
    torch.save(model.state_dict(), "gcn.pt")
    facts = {
        "epochs": epoch,
        "validations": len(validations),
        "checkpoints": 1,
        "accuracy": accuracy,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
