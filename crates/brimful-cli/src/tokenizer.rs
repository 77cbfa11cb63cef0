//! Conversion of text to tokens and back, by a model's own tokenizer, or with each byte as a token.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::{Encoding, PostProcessor, Token, Tokenizer as Vocabulary};

use crate::folder_tokenizer::{self, FolderTemplate, TokenizerConfig};

/// Tokens that end a turn of a conversation.
const TURN_ENDS: [&str; 5] =
    ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"];
/// Number of byte values.
const BYTES: i64 = 256;

/// Tokenizer with the results of the folder's tokenizer in transformers.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    way: Way,
    /// End-of-text token, if the model has one.
    end: Option<i64>,
    /// Chat template, if the folder has one.
    template: Option<FolderTemplate>,
    /// Token that the folder calls `eos_token`.
    named_end: Option<String>,
}

#[derive(Debug)]
enum Way {
    Bytes,
    Words(Box<Words>),
}

/// Tokenizer with a vocabulary.
#[derive(Debug)]
struct Words {
    /// Vocabulary without its post-processor, so that positions of tokens refer to the text alone. The
    /// post-processor's tokens are in `around`.
    vocabulary: Vocabulary,
    /// Special tokens before and after a whole text.
    around: [Vec<i64>; 2],
}

/// A token and its byte range in the text.
pub(crate) type PlacedToken = (i64, Range<usize>);

impl Tokenizer {
    /// Opens the tokenizer of a model's folder. If the folder has none, tokens are bytes.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let told = TokenizerConfig::read(folder)?;
        let (vocabulary, class) = folder_tokenizer::read(folder, &told)?;
        let template = FolderTemplate::read(folder, &told, class.usual_tokens())?;
        let way = match vocabulary {
            Some(vocabulary) => {
                let words = Words::new(vocabulary);
                let path = || folder.join(folder_tokenizer::FILE).display().to_string();
                Way::Words(Box::new(words.with_context(path)?))
            }
            None => Way::Bytes,
        };
        let named_end = told.named_tokens(class.usual_tokens()).remove("eos_token");
        Ok(Self { way, end: None, template, named_end })
    }

    /// Makes a tokenizer for which each byte is a token.
    pub(crate) fn bytes() -> Self {
        Self { way: Way::Bytes, end: None, template: None, named_end: None }
    }

    /// Sets the end-of-text token.
    pub(crate) fn with_end(self, end: Option<i64>) -> Self {
        Self { end, ..self }
    }

    /// Returns whether tokens are the bytes of a text.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.way, Way::Bytes)
    }

    /// Returns the end-of-text token, if the model has one.
    pub(crate) fn end(&self) -> Option<i64> {
        self.end
    }

    /// Returns the chat template, if the folder has one.
    pub(crate) fn template(&self) -> Option<&FolderTemplate> {
        self.template.as_ref()
    }

    /// Returns the token that the folder's tokenizer calls `eos_token`.
    pub(crate) fn named_end(&self) -> Option<i64> {
        self.number(self.named_end.as_deref()?)
    }

    /// Lists the tokens that end an answer: the folder's `eos_token`, and the known tokens at the end of a turn
    /// that its chat template uses.
    pub(crate) fn answer_ends(&self) -> Vec<i64> {
        let is_used = |token: &&str| self.template.as_ref().is_none_or(|own| own.mentions(token));
        let turns = TURN_ENDS.iter().filter(|token| is_used(token));
        let turns = turns.filter_map(|token| self.number(token));
        self.named_end().into_iter().chain(turns).collect()
    }

    /// Returns the number of a token that is in the vocabulary as a whole.
    pub(crate) fn number(&self, token: &str) -> Option<i64> {
        match &self.way {
            Way::Bytes => token.bytes().next().filter(|_| token.len() == 1).map(i64::from),
            Way::Words(words) => words.vocabulary.token_to_id(token).map(i64::from),
        }
    }

    /// Returns the separator between consecutive texts: the end-of-text token, or a line break.
    pub(crate) fn separator(&self) -> Result<Vec<i64>> {
        self.end.map_or_else(|| self.encode_part(None, "\n"), |end| Ok(vec![end]))
    }

    /// Returns the special tokens before and after every whole text.
    pub(crate) fn around(&self) -> [&[i64]; 2] {
        match &self.way {
            Way::Bytes => [&[], &[]],
            Way::Words(words) => words.around.each_ref().map(Vec::as_slice),
        }
    }

    /// Encodes a whole text, with the special tokens around it.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let ([begin, end], tokens) = (self.around(), self.encode_part(None, text)?);
        Ok([begin, &tokens, end].concat())
    }

    /// Encodes the part of a text that follows the character `before`. The tokens are those that the part has
    /// within the whole text.
    pub(crate) fn encode_part(&self, before: Option<char>, text: &str) -> Result<Vec<i64>> {
        if let (Way::Words(_), Some(before)) = (&self.way, before) {
            let placed = self.encode_placed(&format!("{before}{text}"))?;
            let own = placed.iter().position(|(_, place)| place.end > before.len_utf8());
            let own = &placed[own.unwrap_or(placed.len())..];
            // The text before the part is already encoded. So if a token spans the border, the part is encoded
            // alone.
            if own.first().is_none_or(|(_, place)| place.start >= before.len_utf8()) {
                return Ok(own.iter().map(|(token, _)| *token).collect());
            }
        }
        Ok(self.encode_placed(text)?.into_iter().map(|(token, _)| token).collect())
    }

    /// Encodes a text with the position of each token, without special tokens around the text.
    pub(crate) fn encode_placed(&self, text: &str) -> Result<Vec<PlacedToken>> {
        match &self.way {
            Way::Bytes => {
                Ok(text.bytes().enumerate().map(|(at, byte)| (byte.into(), at..at + 1)).collect())
            }
            Way::Words(words) => {
                let encoded =
                    words.vocabulary.encode(text, false).map_err(|error| anyhow!("{error}"));
                let encoded = encoded.context("the tokenizer cannot take the text")?;
                let places = encoded.get_offsets().iter().map(|(start, end)| *start..*end);
                Ok(encoded.get_ids().iter().copied().map(i64::from).zip(places).collect())
            }
        }
    }

    /// Decodes tokens to text. Bytes that are no UTF-8, such as a part of a character, become `�`.
    ///
    /// A model may have more tokens than its tokenizer; the additional tokens stand for no text.
    pub(crate) fn decode(&self, tokens: &[i64]) -> Result<String> {
        match &self.way {
            Way::Bytes => {
                let bytes = tokens.iter().filter_map(|token| u8::try_from(*token).ok());
                Ok(String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned())
            }
            Way::Words(words) => {
                let numbers = tokens.iter().filter_map(|token| u32::try_from(*token).ok());
                let text = words.vocabulary.decode(&numbers.collect::<Vec<u32>>(), false);
                text.map_err(|error| anyhow!("{error}"))
            }
        }
    }

    /// Returns the vocabulary size that a model needs: the largest token id plus one.
    pub(crate) fn vocabulary(&self) -> i64 {
        match &self.way {
            Way::Bytes => BYTES,
            Way::Words(words) => {
                let largest = words.vocabulary.get_vocab(true).into_values().max();
                largest.map_or(0, |largest| i64::from(largest) + 1)
            }
        }
    }

    /// Checks that a model with a vocabulary of `known` tokens has all tokens of the tokenizer.
    pub(crate) fn check(&self, known: i64) -> Result<()> {
        let words = self.vocabulary();
        let whose = match self.is_bytes() {
            true => "it has no tokenizer, and bytes make",
            false => "its tokenizer has",
        };
        ensure!(
            words <= known,
            "{whose} {words} tokens, but its model has a vocabulary of {known}"
        );
        // A post-processor stores numbers of tokens, which need not be in the vocabulary.
        if let Some(other) = self.around().concat().iter().find(|token| **token >= known) {
            bail!(
                "the post_processor of its {} adds the token {other}, but its model knows {known} tokens: they do not \
                 go together",
                folder_tokenizer::FILE
            );
        }
        Ok(())
    }
}

impl Words {
    /// Removes the vocabulary's post-processor, padding and truncation. Stores the post-processor's tokens
    /// separately.
    fn new(mut vocabulary: Vocabulary) -> Result<Self> {
        // Callers need the true lengths of texts, which they cut and pad themselves.
        vocabulary.with_padding(None);
        vocabulary.with_truncation(None).map_err(|error| anyhow!("{error}"))?;
        let around = tokens_around(&vocabulary)?;
        vocabulary.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        Ok(Self { vocabulary, around })
    }
}

/// Returns the special tokens that a vocabulary's post-processor puts before and after a text.
fn tokens_around(vocabulary: &Vocabulary) -> Result<[Vec<i64>; 2]> {
    let Some(processor) = vocabulary.get_post_processor() else { return Ok([vec![], vec![]]) };
    let text = Encoding::from_tokens(vec![Token::new(0, String::new(), (0, 0))], 0);
    let framed = processor.process(text, None, true).map_err(|error| anyhow!("{error}"))?;
    let is_special = framed.get_special_tokens_mask();
    let own = is_special.iter().position(|special| *special == 0);
    let own = own.context("its post_processor leaves the text out")?;
    let ids: Vec<i64> = framed.get_ids().iter().copied().map(i64::from).collect();
    Ok([ids[..own].to_vec(), ids[own + 1..].to_vec()])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const FILE: &str = "tokenizer.json";
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
        assert_eq!(bytes.decode(&[110, 256]).expect("text"), "n");
    }

    #[test]
    fn a_folder_s_own_tokenizer_is_used() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), WORDS).expect("written");
        let words = Tokenizer::open(folder.path()).expect("a tokenizer");
        assert_eq!(words.vocabulary(), 7);
        assert_eq!(words.encode("to be or not to see").expect("tokens"), [1, 2, 3, 6, 1, 0]);
        assert_eq!(words.decode(&[1, 2]).expect("text"), "to be");
        assert_eq!(words.decode(&[1, 4, 9, 2]).expect("text"), "to be");
        assert_eq!((words.named_end(), words.answer_ends()), (None, vec![]));
        fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "not"}"#)
            .expect("written");
        let words = Tokenizer::open(folder.path()).expect("a tokenizer");
        assert_eq!(words.answer_ends(), [6]);
        let error = words.check(6).expect_err("a smaller model").to_string();
        assert!(
            error.starts_with("its tokenizer has 7 tokens, but its model has a vocabulary of 6"),
            "{error}"
        );
        words.check(7).expect("all are known");
    }

    #[test]
    fn tokens_around_a_text_that_the_model_lacks_are_refused_with_their_number() {
        let folder = tempfile::tempdir().expect("a folder");
        let frame = r#"{"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [90000], "tokens": ["<s>"]}}}"#;
        let framed =
            WORDS.replace(r#""post_processor": null"#, &format!("\"post_processor\": {frame}"));
        fs::write(folder.path().join(FILE), framed).expect("written");
        let words = Tokenizer::open(folder.path()).expect("a tokenizer");
        let error = words.check(7).expect_err("a token too many").to_string();
        let says = "the post_processor of its tokenizer.json adds the token 90000, but its model knows 7 tokens";
        assert!(error.starts_with(says), "{error}");
        words.check(90_001).expect("all are known");
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
