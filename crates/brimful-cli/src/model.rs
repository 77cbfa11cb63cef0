//! Models of the program: built-in models by name, and models of Hugging Face folders, with their data, layers,
//! weights and saved files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use brimful::Layers;
use brimful::nn::Lora;
use brimful_models::KeyValueCache;
use brimful_models::pretrained::{
    AdapterFolder, Pretrained, PretrainedError, SavedPart, check_adapter_place, check_model_place,
    is_adapter,
};
use clap::Args;
use tch::Kind;

use crate::data::{self, Dataset, Sample, SampleWishes, Synthetic};
use crate::exit::{ensure_unsaid, ensure_use, wrong_content, wrong_use};
use crate::generation_config::GenerationConfig;
use crate::named::Named;
use crate::setting::{DROPOUT, ModelName, NormStatistics, SEQUENCE, words};
use crate::tokenizer::Tokenizer;

/// Default limit on the tokens of a sequence in fine-tuning.
const TUNED_SEQUENCE: i64 = 2048;

/// Fine-tuning of a Hugging Face folder.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct FineTuneOptions {
    /// Train LoRA adapters of this rank; the base weights stay frozen
    ///
    /// Every projection of the blocks gets an adapter. Write RANK:ALPHA, as in 8:16, to set their scale, which is
    /// ALPHA / RANK [default of ALPHA: twice the rank]. --save writes only the adapters, in PEFT's format
    #[arg(long, value_name = "RANK")]
    pub(crate) lora: Option<LoraFlag>,
    /// LoRA adapter: a folder written by --save or PEFT, which is trained further
    #[arg(long, value_name = "FOLDER", conflicts_with = "lora", hide_short_help = true)]
    pub(crate) adapter: Option<PathBuf>,
    /// Merge the LoRA adapter into the weights that --save writes
    #[arg(long, hide_short_help = true)]
    pub(crate) merge: bool,
    #[arg(long, help = words::FROM_SCRATCH, hide_short_help = true)]
    pub(crate) from_scratch: bool,
}

/// Value of `--lora`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraFlag(pub Lora);

impl FromStr for LoraFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rank, alpha) = match text.split_once(':') {
            Some((rank, alpha)) => (rank, Some(alpha)),
            None => (text, None),
        };
        let rank = words::counted(rank, "give a rank from 1 on, as in 8 or 8:16")?;
        let lora = Lora::new(rank as i64);
        let Some(alpha) = alpha else { return Ok(Self(lora)) };
        let alpha = alpha.parse().ok().filter(|alpha: &f64| alpha.is_finite() && *alpha > 0.0);
        let alpha = alpha.ok_or("give an alpha above 0 after the colon, as in 8:16")?;
        Ok(Self(Lora { alpha, ..lora }))
    }
}

impl fmt::Display for LoraFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lora { rank, alpha, .. } = &self.0;
        write!(f, "{rank}:{alpha}")
    }
}

impl FineTuneOptions {
    /// Refuses these flags for a built-in model.
    fn check_absent(&self) -> Result<()> {
        let flags = [
            ("lora", self.lora.is_some()),
            ("adapter", self.adapter.is_some()),
            ("merge", self.merge),
            ("from-scratch", self.from_scratch),
        ];
        ensure_unsaid(&flags, "a model of a folder: give --model FOLDER")
    }

    /// Returns whether the model's own weights stay frozen.
    pub(crate) fn trains_adapter(&self) -> bool {
        self.lora.is_some() || self.adapter.is_some()
    }

    /// Refuses flags that exclude each other, and flags without the flag that they need.
    fn check(&self) -> Result<()> {
        ensure_use!(
            !self.merge || self.trains_adapter(),
            "--merge is for an adapter: give --lora or --adapter too"
        );
        ensure_use!(
            !self.from_scratch || self.adapter.is_none(),
            "--adapter {} needs the base weights, which --from-scratch does not read: leave one of them out",
            self.adapter.as_deref().unwrap_or(Path::new("")).display()
        );
        Ok(())
    }
}

/// A model: built in, or described by a folder.
#[derive(Debug)]
pub(crate) enum Model {
    Named(ModelName),
    Folder(Arc<FineTune>),
}

impl Model {
    /// Opens a model to train, and refuses options that do not apply to it.
    pub(crate) fn open(source: &ModelSource, options: &FineTuneOptions) -> Result<Self> {
        match source {
            ModelSource::Named(name) => {
                options.check_absent()?;
                Ok(Self::Named(*name))
            }
            ModelSource::Folder(path) => FineTune::open(path, options).map(Self::Folder),
        }
    }

    /// Opens the data with this name or at this path.
    pub(crate) fn data(&self, data: &str, wishes: SampleWishes, seed: u64) -> Result<Dataset> {
        match self {
            Self::Named(name) => name.data(data, wishes, seed),
            Self::Folder(folder) => folder.data(data, wishes.sequence, seed),
        }
    }

    /// Returns the layers for samples of this shape. BatchNorms use the given kind of statistics, or else the
    /// model's default.
    pub(crate) fn layers(
        &self,
        sample: &Sample,
        statistics: Option<NormStatistics>,
    ) -> Result<Layers> {
        match self {
            Self::Named(name) => name.layers_normed(sample, DROPOUT, statistics),
            Self::Folder(_) if statistics.is_some() => Err(wrong_use(
                "--batch-norm is for residual networks, but the model is a language model: leave it out",
            )),
            Self::Folder(folder) => Ok(folder.layers()),
        }
    }

    pub(crate) fn folder(&self) -> Option<&Arc<FineTune>> {
        match self {
            Self::Named(_) => None,
            Self::Folder(folder) => Some(folder),
        }
    }
}

/// A model described by a folder.
#[derive(Debug)]
pub(crate) struct FineTune {
    pretrained: Pretrained,
    tokenizer: Arc<Tokenizer>,
    lora: Option<Lora>,
    /// Adapter that the training starts from, or that is loaded into a trained model.
    adapter: Option<AdapterFolder>,
    merge: bool,
    from_scratch: bool,
}

impl FineTune {
    /// Opens a folder to train its model.
    fn open(folder: &Path, options: &FineTuneOptions) -> Result<Arc<Self>> {
        options.check()?;
        let pretrained = match options.from_scratch {
            true => Pretrained::without_weights(folder),
            false => Pretrained::open(folder),
        };
        let pretrained = pretrained.map_err(|error| match without_weights(folder, &error) {
            true => wrong_use(format!("{error}: --from-scratch initializes the weights at random")),
            false => unopened(folder, &error),
        })?;
        Self::of(pretrained, options)
    }

    /// Opens a folder to use its trained model, with an adapter if one is given.
    pub(crate) fn trained(folder: &Path, adapter: Option<&Path>) -> Result<Arc<Self>> {
        let pretrained = Pretrained::open(folder).map_err(|error| unopened(folder, &error))?;
        let adapter = adapter.map(Path::to_owned);
        Self::of(pretrained, &FineTuneOptions { adapter, ..Default::default() })
    }

    fn of(pretrained: Pretrained, options: &FineTuneOptions) -> Result<Arc<Self>> {
        let tokenizer = Arc::new(checked_tokenizer(&pretrained)?);
        let config = pretrained.config();
        let adapter = options.adapter.as_deref().map(|from| AdapterFolder::open(from, config));
        let adapter = adapter.transpose();
        let adapter = adapter.map_err(|error| wrong_use(format!("--adapter: {error}")))?;
        let width = config.width();
        if let Some(LoraFlag(Lora { rank, .. })) = &options.lora {
            ensure_use!(
                *rank <= width,
                "--lora {rank}: the rank is above the model's width: give at most {width}"
            );
        }
        let lora = match &adapter {
            Some(adapter) => Some(adapter.lora().clone()),
            None => options.lora.clone().map(|LoraFlag(lora)| lora),
        };
        let FineTuneOptions { merge, from_scratch, .. } = *options;
        Ok(Arc::new(Self { pretrained, tokenizer, lora, adapter, merge, from_scratch }))
    }

    /// Returns the folder's tokenizer.
    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the number of tokens that the model sees at once.
    pub(crate) fn context(&self) -> i64 {
        self.pretrained.config().context()
    }

    /// Lists the tokens that end a text, according to the folder's config.json.
    pub(crate) fn end_tokens(&self) -> Vec<i64> {
        self.pretrained.end_tokens()
    }

    /// Returns the settings of the folder's generation_config.json.
    pub(crate) fn generation_config(&self) -> Result<GenerationConfig> {
        GenerationConfig::read(self.pretrained.folder())
    }

    /// Returns a notice if the adapter has dropout, which a training does not apply.
    pub(crate) fn left_out(&self) -> Option<String> {
        let dropout = self.adapter.as_ref().map(AdapterFolder::dropout)?;
        (dropout > 0.0).then(|| {
            format!("--adapter: lora_dropout {dropout} of its adapter_config.json is not applied")
        })
    }

    /// Returns the dtype of the weights in the folder's files, or none for a model with random weights.
    pub(crate) fn stored_kind(&self) -> Option<Kind> {
        self.pretrained.stored_kind()
    }

    /// Opens text in sequences of `sequence` tokens, or of a default length.
    pub(crate) fn data(&self, name: &str, sequence: Option<usize>, seed: u64) -> Result<Dataset> {
        let config = self.pretrained.config();
        let (context, vocabulary) = (config.context(), config.vocabulary());
        let usual = if self.stored_kind().is_some() { TUNED_SEQUENCE } else { SEQUENCE };
        let length = sequence.map_or(usual.min(context), |tokens| tokens as i64);
        ensure_use!(
            length <= context,
            "--sequence {length} is longer than the {context} tokens that the model takes"
        );
        match name {
            path if path == "digits" || Path::new(path).is_dir() => Err(wrong_use(
                "a model of a folder needs text: give --data a text file, or synthetic",
            )),
            "synthetic" => {
                let sample = Sample::Sequence { length, vocabulary };
                data::synthetic(&Synthetic::usual(sample, seed))
            }
            path => {
                let open = |length| data::open_text(Path::new(path), length, &self.tokenizer);
                let opened = open(length).or_else(|error| match data::usual_length(&error) {
                    Some(shorter) if sequence.is_none() => open(shorter),
                    _ => Err(error),
                });
                opened.map_err(wrong_content)
            }
        }
    }

    /// Returns the model's layers, with LoRA if wanted.
    pub(crate) fn layers(&self) -> Layers {
        self.adapted(self.pretrained.config().layers())
    }

    /// Returns the model's layers with a key-value cache, and with LoRA if wanted.
    pub(crate) fn layers_with_cache(&self, cache: &KeyValueCache) -> Layers {
        self.adapted(self.pretrained.config().layers_with_cache(cache))
    }

    fn adapted(&self, layers: Layers) -> Layers {
        match &self.lora {
            Some(lora) => layers.lora(lora),
            None => layers,
        }
    }

    /// Loads the folder's weights into the variables, and the adapter's weights if there is an adapter.
    pub(crate) fn load(&self, variables: &Named) -> Result<()> {
        self.pretrained.load(variables)?;
        let adapter = self.adapter.iter();
        adapter.map(|adapter| adapter.load(variables)).try_for_each(|loaded| Ok(loaded?))
    }

    /// Loads variables from a folder written by [`FineTune::save`]. With LoRA, loads the model that the training
    /// started from instead.
    pub(crate) fn load_saved(&self, folder: &Path, variables: &Named) -> Result<()> {
        match self.lora {
            Some(_) => Ok(self.pretrained.load(variables)?),
            None => Ok(Pretrained::open(folder)?.load(variables)?),
        }
    }

    /// Returns whether the run's file must hold a variable, because [`FineTune::load_saved`] cannot restore the
    /// variable.
    pub(crate) fn lacks(&self, name: &str, has_averages: bool) -> bool {
        match self.lora {
            Some(_) => Lora::is_adapter(name),
            // The folder has the averages in place of the weights.
            None => has_averages,
        }
    }

    /// Refuses a folder for `--save` if other files in it would be lost. Also refuses to save an adapter without
    /// its random base weights, because no other model could use the adapter.
    pub(crate) fn check_place(&self, folder: &Path) -> Result<()> {
        let shown = folder.display();
        ensure_use!(
            !(self.from_scratch && self.writes_adapter()),
            "--save {shown} would write an adapter without the random base weights of --from-scratch: add \
             --merge to write the whole model"
        );
        self.refuse_occupied(folder).map_err(|error| wrong_use(format!("--save {shown}: {error}")))
    }

    /// Refuses a folder with files that are not a model's, because the write would delete them.
    fn refuse_occupied(&self, folder: &Path) -> Result<(), PretrainedError> {
        match self.writes_adapter() {
            true => check_adapter_place(folder),
            false => check_model_place(folder),
        }
    }

    /// Returns whether [`FineTune::save`] writes this variable.
    pub(crate) fn writes(&self, name: &str) -> bool {
        !self.writes_adapter() || Lora::is_adapter(name)
    }

    fn writes_adapter(&self) -> bool {
        self.lora.is_some() && !self.merge
    }

    /// Writes the model with these variables to a folder, or with LoRA only its adapter. `add` may write more
    /// files into the folder. The write is atomic.
    pub(crate) fn save(
        &self,
        folder: &Path,
        variables: &Named,
        add: impl FnOnce(&Path) -> brimful::Result<()>,
    ) -> brimful::Result<()> {
        let part = match (&self.lora, self.merge) {
            (None, _) => SavedPart::Model,
            (Some(lora), true) => SavedPart::Merged(lora),
            (Some(lora), false) => SavedPart::Adapter(lora),
        };
        let saved = self.pretrained.save_with(folder, part, variables, add);
        saved.map_err(|error| unwritten(folder, error))
    }
}

/// Makes the error for a folder that holds no model. If the folder holds an adapter, the error says so.
pub(crate) fn unopened(folder: &Path, error: &PretrainedError) -> anyhow::Error {
    match is_adapter(folder) {
        true => wrong_use(format!(
            "{} holds a LoRA adapter, not a model: give --model the folder of its base model, and this one to \
             --adapter",
            folder.display()
        )),
        false => wrong_use(error.to_string()),
    }
}

/// Returns whether a folder lacks only its weights.
fn without_weights(folder: &Path, error: &PretrainedError) -> bool {
    let is_unread = matches!(error, PretrainedError::Brimful(brimful::Error::File { .. }));
    is_unread && Pretrained::without_weights(folder).is_ok()
}

/// Returns whether `--save` names a folder, not a file of a run.
pub(crate) fn is_folder(path: &Path) -> bool {
    path.extension().is_none_or(|extension| extension != "safetensors")
}

/// Opens the folder's tokenizer, and checks that the model has all of its tokens.
fn checked_tokenizer(pretrained: &Pretrained) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::open(pretrained.folder()).map_err(wrong_content)?;
    let known = pretrained.config().vocabulary();
    tokenizer
        .check(known)
        .map_err(|error| wrong_use(format!("{}: {error}", pretrained.folder().display())))?;
    let ends = pretrained.end_tokens().into_iter().chain(tokenizer.named_end());
    let end = ends.into_iter().find(|end| (0..known).contains(end));
    Ok(tokenizer.with_end(end))
}

fn unwritten(folder: &Path, error: PretrainedError) -> brimful::Error {
    match error {
        PretrainedError::Brimful(error) => error,
        other => brimful::Error::File {
            action: "write",
            path: folder.display().to_string(),
            reason: other.to_string(),
        },
    }
}

/// Prefixes of names of models that are not built in, but can be read from folders.
const FOLDERS_ALONE: [&str; 3] = ["llama", "mistral", "qwen"];

/// Value of `--model`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A built-in model.
    Named(ModelName),
    /// A folder with a config.json.
    Folder(PathBuf),
}

impl FromStr for ModelSource {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if text.contains(['/', '.']) {
            bail!("there is no folder {text}: name one with a config.json, or a model by its name");
        }
        if FOLDERS_ALONE.iter().any(|family| text.to_lowercase().starts_with(family)) {
            bail!(
                "there is no folder {text} here, and such a model is read from one: give the path of a folder \
                 with its config.json, model.safetensors and tokenizer.json"
            );
        }
        let named: Result<_> = text.parse();
        named
            .map(Self::Named)
            .map_err(|error| anyhow!("{error} (nor is there a folder {text} here)"))
    }
}

impl ModelSource {
    /// Returns a notice if a published model has the name of this built-in model. The notice says that the
    /// published weights are not loaded.
    pub(crate) fn notice(&self) -> Option<String> {
        let Self::Named(name) = self else { return None };
        let published =
            [ModelName::Gpt2, ModelName::Gpt2Medium, ModelName::Gpt2Large, ModelName::Gpt2Xl];
        published.contains(name).then(|| {
            format!(
                "--model {name}: there is no folder {name} here, so this is its architecture with random \
                 weights; for the published weights give the path of their folder"
            )
        })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => name.fmt(f),
            Self::Folder(path) => path.display().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_comes_alone_or_with_its_alpha() {
        assert_eq!("8".parse(), Ok(LoraFlag(Lora::new(8))));
        assert_eq!("8:4".parse(), Ok(LoraFlag(Lora { alpha: 4.0, ..Lora::new(8) })));
        for (text, words) in [
            ("0", "give a rank from 1 on"),
            ("x", "give a rank from 1 on"),
            ("8:", "give an alpha above 0"),
            ("8:-1", "give an alpha above 0"),
        ] {
            let error = text.parse::<LoraFlag>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn names_of_models_that_come_in_folders_say_that_a_folder_is_meant() {
        for name in ["llama", "Llama-3-8B", "mistral", "qwen2"] {
            let error = name.parse::<ModelSource>().expect_err(name).to_string();
            assert!(error.starts_with(&format!("there is no folder {name} here")), "{error}");
        }
    }

    #[test]
    fn a_shape_that_shares_its_name_with_a_published_model_says_so() {
        let notice = |name: &str| name.parse::<ModelSource>().expect("a model").notice();
        assert!(notice("gpt2").is_some_and(|notice| notice.contains("random weights")));
        assert_eq!((notice("gpt"), notice("mlp")), (None, None));
    }
}
