//! Text as numbers and back: by a model's own tokenizer, or a number for each byte.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use tokenizers::Tokenizer as Vocabulary;

use crate::folder_template::FolderTemplate;

/// What a folder's tokenizer is called.
const FILE: &str = "tokenizer.json";
/// The numbers that a byte can be.
const BYTES: i64 = 256;

/// How text becomes tokens.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    way: Way,
    /// The token that ends a text, where the model has one.
    end: Option<i64>,
    /// How conversations are written, where the folder says so.
    template: Option<FolderTemplate>,
}

#[derive(Debug)]
enum Way {
    Bytes,
    Words(Box<Vocabulary>),
}

impl Tokenizer {
    /// The tokenizer of a model's folder: its `tokenizer.json`, or bytes where it has none.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let template = FolderTemplate::read(folder)?;
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(Self { template, ..Self::bytes() });
        }
        let words = Vocabulary::from_file(&path).map_err(|error| anyhow!("{error}"));
        let mut words = words.with_context(|| format!("{} cannot be read", path.display()))?;
        // Whoever cuts or pads sequences does so knowing their lengths: a tokenizer's own settings for
        // that would do it unseen.
        words.with_padding(None);
        words.with_truncation(None).map_err(|error| anyhow!("{error}"))?;
        Ok(Self { way: Way::Words(Box::new(words)), end: None, template })
    }

    /// A token for each byte.
    pub(crate) fn bytes() -> Self {
        Self { way: Way::Bytes, end: None, template: None }
    }

    /// The same with a token that ends a text.
    pub(crate) fn with_end(self, end: Option<i64>) -> Self {
        Self { end, ..self }
    }

    /// Whether a text's bytes are its tokens.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.way, Way::Bytes)
    }

    /// The token that ends a text, where there is one.
    pub(crate) fn end(&self) -> Option<i64> {
        self.end
    }

    /// How conversations are written, where the folder says so.
    pub(crate) fn template(&self) -> Option<&FolderTemplate> {
        self.template.as_ref()
    }

    /// Whether this is one token.
    pub(crate) fn has(&self, token: &str) -> bool {
        match &self.way {
            Way::Bytes => token.len() == 1,
            Way::Words(words) => words.token_to_id(token).is_some(),
        }
    }

    /// What stands between texts that follow on each other: the token that ends one, or a line break.
    pub(crate) fn separator(&self) -> Result<Vec<i64>> {
        self.end.map_or_else(|| self.encode("\n"), |end| Ok(vec![end]))
    }

    /// The tokens of a text, without those that a tokenizer puts around a whole one.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<i64>> {
        match &self.way {
            Way::Bytes => Ok(text.bytes().map(i64::from).collect()),
            Way::Words(words) => {
                let encoded = words.encode(text, false).map_err(|error| anyhow!("{error}"));
                let encoded = encoded.context("the tokenizer cannot take the text")?;
                Ok(encoded.get_ids().iter().copied().map(i64::from).collect())
            }
        }
    }

    /// The text of these tokens; what is no text, such as a part of a letter, is shown as `�`.
    pub(crate) fn decode(&self, tokens: &[i64]) -> Result<String> {
        let none = |token: i64| anyhow!("{token} is no token: there are {}", self.vocabulary());
        match &self.way {
            Way::Bytes => {
                let bytes =
                    tokens.iter().map(|&token| u8::try_from(token).map_err(|_| none(token)));
                Ok(String::from_utf8_lossy(&bytes.collect::<Result<Vec<u8>>>()?).into_owned())
            }
            Way::Words(words) => {
                let numbers = tokens.iter().map(|&token| {
                    let number = u32::try_from(token).map_err(|_| none(token))?;
                    words.id_to_token(number).map(|_| number).ok_or_else(|| none(token))
                });
                let text = words.decode(&numbers.collect::<Result<Vec<u32>>>()?, false);
                text.map_err(|error| anyhow!("{error}"))
            }
        }
    }

    /// How many tokens a model must know: one more than the largest number.
    pub(crate) fn vocabulary(&self) -> i64 {
        match &self.way {
            Way::Bytes => BYTES,
            Way::Words(words) => {
                let largest = words.get_vocab(true).into_values().max();
                largest.map_or(0, |largest| i64::from(largest) + 1)
            }
        }
    }

    /// Makes sure that a model knows all tokens.
    pub(crate) fn check(&self, known: i64) -> Result<()> {
        let words = self.vocabulary();
        let whose = match self.is_bytes() {
            true => "it has no tokenizer.json, and bytes as tokens are",
            false => "its tokenizer has",
        };
        ensure!(
            words <= known,
            "{whose} {words} tokens, but its model knows {known}: they do not go together"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "unk_token": "?",
        "vocab": {"?": 0, "to": 1, "be": 2, "or": 3, "not": 6}}}"#;

    #[test]
    fn bytes_come_back_as_the_text_they_were() {
        let bytes = Tokenizer::bytes();
        let tokens = bytes.encode("né").expect("bytes");
        assert_eq!(tokens, [110, 195, 169]);
        assert_eq!(bytes.decode(&tokens).expect("text"), "né");
        assert_eq!(bytes.decode(&tokens[..2]).expect("text"), "n�");
        let error = bytes.decode(&[7, 256]).expect_err("no byte").to_string();
        assert_eq!(error, "256 is no token: there are 256");
    }

    #[test]
    fn a_folder_s_own_tokenizer_is_used() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), WORDS).expect("written");
        let words = Tokenizer::open(folder.path()).expect("a tokenizer");
        assert_eq!(words.vocabulary(), 7);
        assert_eq!(words.encode("to be or not to see").expect("tokens"), [1, 2, 3, 6, 1, 0]);
        assert_eq!(words.decode(&[1, 2]).expect("text"), "to be");
        assert_eq!(
            words.decode(&[4]).expect_err("a gap").to_string(),
            "4 is no token: there are 7"
        );
        let error = words.check(6).expect_err("a smaller model").to_string();
        assert!(error.starts_with("its tokenizer has 7 tokens, but its model knows 6"), "{error}");
        words.check(7).expect("all are known");
    }

    #[test]
    fn a_folder_without_a_tokenizer_has_bytes_and_one_that_is_none_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let bytes = Tokenizer::open(folder.path()).expect("nothing there");
        assert_eq!(bytes.vocabulary(), BYTES);
        fs::write(folder.path().join(FILE), "{}").expect("written");
        let error = format!("{:#}", Tokenizer::open(folder.path()).expect_err("no tokenizer"));
        assert!(error.contains("tokenizer.json cannot be read: "), "{error}");
    }
}
