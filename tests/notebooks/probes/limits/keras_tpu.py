# expect: refused R0
# cause: Keras on TPU: no SFTTrainer
# %%
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, keras_nlp
gemma_lm = keras_nlp.models.GemmaCausalLM.from_preset("gemma_2b_en")
gemma_lm.backbone.enable_lora(rank=4)
gemma_lm.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="adam")
gemma_lm.fit(["a", "b"], epochs=1, batch_size=1)
