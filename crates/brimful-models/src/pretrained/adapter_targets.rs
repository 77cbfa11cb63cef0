//! Layers that an adapter_config.json targets, by PEFT's rules, with the rank and alpha of each.

use std::collections::BTreeSet;

use brimful::nn::Lora;
use fancy_regex::Regex;
use serde_json::Value;

use super::fields::Fields;
use super::{Config, PretrainedError};

/// Limit on the rank of an adapter.
const LARGEST_RANK: i64 = 1 << 20;
/// Default of PEFT's rank and alpha.
const USUAL: i64 = 8;
/// PEFT's name for all projections.
const ALL: &str = "all-linear";
/// Initialisations that leave the model's weights unchanged; others subtract a part of the weights.
const BEGINNINGS: [&str; 3] = ["gaussian", "eva", "orthogonal"];
/// Remedy for an adapter that is refused.
const MERGE: &str =
    "merge it into its model with PEFT (merge_and_unload), and give the folder of the merged model";

/// Reads the LoRA configuration for this model; refuses unknown methods.
pub(super) fn lora_of(fields: &Fields<'_>, config: &Config) -> Result<Lora, PretrainedError> {
    check_method(fields)?;
    let targets = targets(fields, config)?;
    let rank = positive_or(fields, "r")?;
    let alpha = fields.number_or("lora_alpha", USUAL as f64)?;
    let ranks = Patterns::of(fields, "rank_pattern")?;
    let alphas = Patterns::of(fields, "alpha_pattern")?;
    let stabilized = fields.flag_or("use_rslora", false)?;
    // With rsLoRA the scale is alpha / √rank instead of alpha / rank, which a larger alpha expresses.
    let scaled =
        |alpha: f64, rank: i64| if stabilized { alpha * (rank as f64).sqrt() } else { alpha };
    let mut overrides = Vec::new();
    for target in &targets {
        let (own_rank, own_alpha) = (ranks.value_of(target)?, alphas.value_of(target)?);
        if own_rank.is_none() && own_alpha.is_none() {
            continue;
        }
        let rank = own_rank.map_or(Ok(rank), |value| ranks.rank(value))?;
        let alpha = own_alpha.map_or(Ok(alpha), |value| alphas.number(value))?;
        let alpha = scaled(alpha, rank);
        overrides.push(Lora { rank, alpha, targets: vec![target.clone()], overrides: Vec::new() });
    }
    fields.check_known()?;
    Ok(Lora { rank, alpha: scaled(alpha, rank), targets, overrides })
}

fn positive_or(fields: &Fields<'_>, field: &str) -> Result<i64, PretrainedError> {
    if fields.is_given(field) { fields.positive(field, LARGEST_RANK) } else { Ok(USUAL) }
}

/// Refuses any method but LoRA of projections.
fn check_method(fields: &Fields<'_>) -> Result<(), PretrainedError> {
    fields.text("peft_type")?;
    fields.only("peft_type", &["LORA"])?;
    fields.only("task_type", &["CAUSAL_LM"])?;
    fields.only("bias", &["none"])?;
    for field in [
        "use_dora",
        "use_qalora",
        "use_bdlora",
        "lora_bias",
        "modules_to_save",
        "target_parameters",
        "layer_replication",
        "megatron_config",
        "arrow_config",
        "kasa_config",
        "velora_config",
        "monteclora_config",
    ] {
        fields.off(field, MERGE)?;
    }
    // PEFT treats an empty list differently from none.
    for field in ["trainable_token_indices", "alora_invocation_tokens"] {
        fields.check(field, !fields.is_given(field), || {
            format!("is given, which is not known here: {MERGE}")
        })?;
    }
    check_beginning(fields)
}

/// Refuses adapters that were initialised with a part of the model's weights: the adapter's model then differs from
/// the folder's.
fn check_beginning(fields: &Fields<'_>) -> Result<(), PretrainedError> {
    let field = "init_lora_weights";
    match fields.value(field) {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(word)) => fields.check(field, BEGINNINGS.contains(&word.as_str()), || {
            format!(
                "is '{word}', which may change the weights of the model: save the adapter with PEFT's \
                 path_initial_model_for_weight_conversion, or {MERGE}"
            )
        }),
        Some(_) => Err(fields.wrong(field, "is neither true nor false nor a text")),
    }
}

/// Returns the names of the targeted layers, all of which must be projections.
fn targets(fields: &Fields<'_>, config: &Config) -> Result<Vec<String>, PretrainedError> {
    let field = "target_modules";
    let modules = modules(config)?;
    let projections = config.projections();
    let is_projection = |name: &String| {
        let last = name.rsplit('.').next();
        last.is_some_and(|last| projections.iter().any(|known| known == last))
    };
    let wanted = Wanted::of(fields)?;
    let mut found = Vec::new();
    for name in modules {
        if wanted.has(&name, is_projection(&name))? {
            found.push(name);
        }
    }
    fields.check(field, !found.is_empty(), || {
        format!("means no layer of this model: its projections are {}", projections.join(", "))
    })?;
    if let Some(other) = found.iter().find(|name| !is_projection(name)) {
        return Err(fields.wrong(
            field,
            format!("means '{other}' too, beside which nothing can be added here: {MERGE}"),
        ));
    }
    Ok(found)
}

/// Returns the names of all modules of a model, including a tied head.
fn modules(config: &Config) -> Result<BTreeSet<String>, PretrainedError> {
    let mut modules = BTreeSet::from([crate::LANGUAGE_HEAD.to_owned()]);
    for name in config.layers().variable_shapes()?.into_keys() {
        modules.extend(name.match_indices('.').map(|(end, _)| name[..end].to_owned()));
    }
    Ok(modules)
}

/// Selection of modules by `target_modules` and its companions.
struct Wanted<'a> {
    fields: &'a Fields<'a>,
    targets: Names<'a>,
    excluded: Names<'a>,
    layers: Vec<i64>,
    /// Patterns of names up to a layer's number, which is the last capture group.
    before_number: Vec<Regex>,
}

impl<'a> Wanted<'a> {
    fn of(fields: &'a Fields<'a>) -> Result<Self, PretrainedError> {
        let [targets, excluded] =
            ["target_modules", "exclude_modules"].map(|field| Names::of(fields, field));
        let (targets, excluded) = (targets?, excluded?);
        let is_none = matches!(&targets, Names::List(list) if list.is_empty());
        fields.check("target_modules", !is_none, || "is missing, or empty".into())?;
        let layers = fields.whole_numbers("layers_to_transform")?;
        let patterns = fields.texts("layers_pattern")?;
        let is_list = matches!(targets, Names::List(_));
        fields.check("layers_to_transform", layers.is_empty() || is_list, || {
            "goes with a list of target_modules alone".into()
        })?;
        fields.check("layers_pattern", patterns.is_empty() || !layers.is_empty(), || {
            "goes with layers_to_transform alone".into()
        })?;
        let patterns: Vec<String> = match patterns.is_empty() {
            true => vec![r"^.*?\.[^.]*\.(\d+)\.".into()],
            false => patterns
                .iter()
                .map(|pattern| format!(r"^(?:|.*?\.)(?:{pattern})\.(?P<brimful>\d+)\."))
                .collect(),
        };
        let regexes = patterns.iter().map(|pattern| regex(fields, "layers_pattern", pattern));
        let before_number = regexes.collect::<Result<_, _>>()?;
        Ok(Self { fields, targets, excluded, layers, before_number })
    }

    /// Returns whether the module of this name is targeted.
    fn has(&self, name: &str, is_projection: bool) -> Result<bool, PretrainedError> {
        if self.excluded.has(self.fields, name, is_projection)?
            || !self.targets.has(self.fields, name, is_projection)?
        {
            return Ok(false);
        }
        let is_whole = matches!(&self.targets, Names::List(list) if list.contains(&name));
        if self.layers.is_empty() || is_whole {
            return Ok(true);
        }
        for pattern in &self.before_number {
            let found = pattern
                .captures(name)
                .map_err(|reason| self.fields.wrong("layers_pattern", reason.to_string()))?;
            if let Some(number) = found.and_then(|found| found.iter().flatten().last()) {
                return Ok(number.as_str().parse().is_ok_and(|n: i64| self.layers.contains(&n)));
            }
        }
        Ok(false)
    }
}

/// Names of modules, as PEFT reads them.
enum Names<'a> {
    /// All projections.
    All,
    /// Whole names, or their ends after a dot.
    List(Vec<&'a str>),
    /// Regular expression for whole names, and the field that has it.
    Matching(Regex, &'static str),
}

impl<'a> Names<'a> {
    fn of(fields: &Fields<'a>, field: &'static str) -> Result<Self, PretrainedError> {
        match fields.value(field) {
            Some(Value::String(word))
                if field == "target_modules" && word.to_lowercase() == ALL =>
            {
                Ok(Self::All)
            }
            Some(Value::String(pattern)) if !pattern.is_empty() => {
                Ok(Self::Matching(regex(fields, field, &format!(r"\A(?:{pattern})\z"))?, field))
            }
            Some(Value::String(_)) => Ok(Self::List(Vec::new())),
            _ => Ok(Self::List(fields.texts(field)?)),
        }
    }

    fn has(
        &self,
        fields: &Fields<'_>,
        name: &str,
        is_projection: bool,
    ) -> Result<bool, PretrainedError> {
        match self {
            Self::All => Ok(is_projection),
            Self::List(list) => Ok(list.iter().any(|end| {
                let before = name.strip_suffix(end);
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            })),
            Self::Matching(pattern, field) => pattern
                .is_match(name)
                .map_err(|reason| fields.wrong(field, format!("cannot be matched: {reason}"))),
        }
    }
}

fn regex(fields: &Fields<'_>, field: &str, pattern: &str) -> Result<Regex, PretrainedError> {
    Regex::new(pattern).map_err(|reason| {
        fields.wrong(field, format!("is no regular expression that is known here: {reason}"))
    })
}

/// Numbers of layers, each with a regular expression for the end of a layer's name.
struct Patterns<'a> {
    fields: &'a Fields<'a>,
    field: &'static str,
    list: Vec<(Regex, &'a Value)>,
}

impl<'a> Patterns<'a> {
    fn of(fields: &'a Fields<'a>, field: &'static str) -> Result<Self, PretrainedError> {
        let map = match fields.value(field) {
            None => return Ok(Self { fields, field, list: Vec::new() }),
            Some(value) => value.as_object(),
        };
        let map = map.ok_or_else(|| fields.wrong(field, "is no object of numbers"))?;
        let pattern = |(end, value): (&String, &'a Value)| {
            Ok((regex(fields, field, &format!(r"^(?:.*\.)?(?:{end})$"))?, value))
        };
        let list = map.iter().map(pattern).collect::<Result<_, PretrainedError>>()?;
        Ok(Self { fields, field, list })
    }

    /// Returns the value for a name, if there is one. Refuses different values for one name: PEFT takes the first in
    /// the file, but the order of a file is not kept here.
    fn value_of(&self, name: &str) -> Result<Option<&'a Value>, PretrainedError> {
        let mut found = None;
        for (pattern, value) in &self.list {
            let fits = pattern.is_match(name);
            let fits = fits.map_err(|reason| self.fields.wrong(self.field, reason.to_string()))?;
            if fits && found.is_some_and(|found| found != *value) {
                return Err(self.fields.wrong(
                    self.field,
                    format!("says two numbers for '{name}': make its patterns exclude each other"),
                ));
            }
            found = if fits { Some(*value) } else { found };
        }
        Ok(found)
    }

    fn rank(&self, value: &Value) -> Result<i64, PretrainedError> {
        let rank = value.as_i64().filter(|rank| (1..=LARGEST_RANK).contains(rank));
        rank.ok_or_else(|| self.fields.wrong(self.field, format!("has {value}, which is no rank")))
    }

    fn number(&self, value: &Value) -> Result<f64, PretrainedError> {
        let number = value.as_f64();
        number.ok_or_else(|| {
            self.fields.wrong(self.field, format!("has {value}, which is no number"))
        })
    }
}
