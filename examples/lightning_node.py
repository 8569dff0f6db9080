"""Lightning: a LightningModule with PyG layers, LightningNodeData, and a callback that lets the sampler learn."""

import os
import sys

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import adahop
from adahop.pyg import AdaptiveSampler, callback, inference, scale_messages

try:
    import lightning as L
    from torch_geometric.data.lightning import LightningNodeData
except ImportError:
    print("this example needs lightning: pip install 'adahop[lightning]'")
    sys.exit(0)

data = adahop.load(sys.argv[1] if len(sys.argv) > 1 else "digits")
epochs = int(os.environ.get("EPOCHS", "10"))


class Node(L.LightningModule):
    """Knows nothing of the sampler, except that it passes on `edge_weight`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.net = scale_messages(GraphSAGE(inputs, 64, num_layers=2, out_channels=outputs, dropout=0.3))

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index, edge_weight=batch.edge_weight)[: batch.batch_size]
        return F.cross_entropy(out, batch.y[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


L.seed_everything(0, verbose=False)
sampler = AdaptiveSampler(data, [5, 5])
nodes = LightningNodeData(
    data, input_train_nodes=data.train_mask, loader="custom", node_sampler=sampler, transform=sampler.attach,
    batch_size=256, num_workers=0,
)  # fmt: skip
model = Node(data.x.shape[1], data.classes)
trainer = L.Trainer(
    max_epochs=epochs, callbacks=[callback(sampler)], accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, datamodule=nodes)

right = inference(model.net, data).argmax(1) == data.y  # all neighbours, layer by layer
print(f"test accuracy {right[data.test_mask].float().mean():.3f}")
