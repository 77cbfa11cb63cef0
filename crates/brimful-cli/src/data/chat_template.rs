//! Encoding of conversations into tokens, by the chat template that belongs to the model's tokenizer.

use std::ops::Range;

use anyhow::{Result, ensure};

use crate::folder_tokenizer::FolderTemplate;
use crate::tokenizer::Tokenizer;

pub(super) use crate::chat_message::{ChatMessage, ChatText};
/// Tokens at the start and the end of a message in ChatML.
const CHAT_ML: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// Tokens, and for each token whether it belongs to an answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct MarkedTokens {
    pub(super) tokens: Vec<i64>,
    pub(super) answers: Vec<bool>,
}

/// Text form of a conversation.
#[derive(Debug, Clone, Copy)]
pub(super) enum ChatTemplate<'a> {
    /// The template of the model's folder, which writes the whole text.
    Own(&'a FolderTemplate),
    /// `<|role|>`, a line break, the content, a line break; after an answer the end-of-text token.
    Plain,
    /// `<|im_start|>role`, a line break, the content, `<|im_end|>`, a line break.
    ChatMl,
}

impl<'a> ChatTemplate<'a> {
    pub(super) fn of(tokenizer: &'a Tokenizer) -> Self {
        match tokenizer.template() {
            Some(own) => Self::Own(own),
            None if CHAT_ML.iter().all(|token| tokenizer.number(token).is_some()) => Self::ChatMl,
            None => Self::Plain,
        }
    }

    /// Encodes a conversation.
    ///
    /// # Errors
    /// Fails if the folder's own template is invalid or does not accept these messages, or the tokenizer does not
    /// accept the text.
    pub(super) fn encode(
        self,
        messages: &[ChatMessage],
        tokenizer: &Tokenizer,
    ) -> Result<MarkedTokens> {
        let calls = messages.iter().any(|message| message.told.contains_key("tool_calls"));
        ensure!(
            !calls || matches!(self, Self::Own(_)),
            "a message has tool_calls, which a folder's chat template alone can write, and the folder has none: give \
             their text as the content"
        );
        match self {
            Self::Own(template) => {
                let chat = template.understood()?.write(messages)?;
                MarkedTokens::default().with(&chat, None, tokenizer)
            }
            Self::Plain => MarkedTokens::of_text(&written(messages, plainly), tokenizer),
            Self::ChatMl => {
                let begun = MarkedTokens::begun(tokenizer);
                begun.with(&written(messages, in_chat_ml), None, tokenizer)
            }
        }
    }
}

fn written(messages: &[ChatMessage], write: fn(&ChatMessage, &mut ChatText)) -> ChatText {
    let mut chat = ChatText::default();
    messages.iter().for_each(|message| write(message, &mut chat));
    chat
}

fn plainly(message: &ChatMessage, chat: &mut ChatText) {
    let ChatMessage { role, content, .. } = message;
    chat.push(&format!("<|{role}|>\n"), false);
    chat.push(&format!("{content}\n"), message.is_answer());
}

/// Writes a message in ChatML. The end token belongs to the answer, so that the model learns where to stop.
fn in_chat_ml(message: &ChatMessage, chat: &mut ChatText) {
    let ChatMessage { role, content, .. } = message;
    let [start, end] = CHAT_ML;
    chat.push(&format!("{start}{role}\n"), false);
    chat.push(&format!("{content}{end}"), message.is_answer());
    chat.push("\n", false);
}

impl MarkedTokens {
    /// Encodes a complete text, with the tokenizer's special tokens before it and the end-of-text token after each
    /// answer.
    pub(super) fn of_text(chat: &ChatText, tokenizer: &Tokenizer) -> Result<Self> {
        Self::begun(tokenizer).with(chat, tokenizer.end(), tokenizer)
    }

    /// Starts with the special tokens that precede a text.
    fn begun(tokenizer: &Tokenizer) -> Self {
        let [begin, _] = tokenizer.around();
        Self { tokens: begin.to_vec(), answers: vec![false; begin.len()] }
    }

    /// Encodes a text as a whole and appends its tokens. A token that overlaps an answer belongs to the answer. If
    /// there is an `end`, that token is added after each answer.
    fn with(mut self, chat: &ChatText, end: Option<i64>, tokenizer: &Tokenizer) -> Result<Self> {
        let mut answers = chat.answers.iter().filter(|answer| !answer.is_empty()).peekable();
        for (token, place) in tokenizer.encode_placed(&chat.text)? {
            while answers.next_if(|answer| answer.end <= place.start).is_some() {
                self.extend(end, true);
            }
            let is_answer =
                |answer: &&Range<usize>| answer.start < place.end || answer.contains(&place.start);
            let is_answer = answers.peek().is_some_and(is_answer);
            self.extend([token], is_answer);
        }
        answers.for_each(|_| self.extend(end, true));
        Ok(self)
    }

    fn extend(&mut self, tokens: impl IntoIterator<Item = i64>, are_answers: bool) {
        self.tokens.extend(tokens);
        self.answers.resize(self.tokens.len(), are_answers);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the conversation's text, and the answers in it.
    fn written(tokenizer: &Tokenizer) -> (String, String) {
        tried(tokenizer, &[("user", "hi"), ("assistant", "yo"), ("user", "so")]).expect("tokens")
    }

    fn tried(tokenizer: &Tokenizer, said: &[(&str, &str)]) -> Result<(String, String)> {
        let message = |(role, content): &(&str, &str)| ChatMessage::new(*role, *content);
        let messages: Vec<ChatMessage> = said.iter().map(message).collect();
        let MarkedTokens { tokens, answers } =
            ChatTemplate::of(tokenizer).encode(&messages, tokenizer)?;
        let learnt = tokens.iter().zip(answers).filter(|(_, is_answer)| *is_answer);
        let learnt: Vec<i64> = learnt.map(|(token, _)| *token).collect();
        Ok((tokenizer.decode(&tokens)?, tokenizer.decode(&learnt)?))
    }

    #[test]
    fn without_a_form_of_its_own_a_conversation_is_written_plainly() {
        let all = "<|user|>\nhi\n<|assistant|>\nyo\n<|user|>\nso\n";
        assert_eq!(written(&Tokenizer::bytes()), (all.into(), "yo\n".into()));
        let ended = all.replace("yo\n", "yo\n~");
        let with_end = Tokenizer::bytes().with_end(Some(i64::from(b'~')));
        assert_eq!(written(&with_end), (ended, "yo\n~".into()));
    }

    #[test]
    fn a_tokenizer_with_the_tokens_of_chat_ml_has_it_written_so() {
        let words = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
            "added_tokens": [
                {"id": 1, "content": "<|im_start|>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true},
                {"id": 2, "content": "<|im_end|>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true}],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "<|im_start|>": 1,
            "<|im_end|>": 2, "user": 3, "assistant": 4, "hi": 5, "yo": 6, "so": 7}}}"#;
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("tokenizer.json"), words).expect("written");
        let tokenizer = Tokenizer::open(folder.path()).expect("a tokenizer");
        let all = "<|im_start|> user hi <|im_end|> <|im_start|> assistant yo <|im_end|> \
                   <|im_start|> user so <|im_end|>";
        assert_eq!(written(&tokenizer), (all.into(), "yo <|im_end|>".into()));
    }

    /// Makes a byte tokenizer with a template in its folder, with `^` and `$` around its texts.
    fn with_template(template: &str) -> Tokenizer {
        let folder = tempfile::tempdir().expect("a folder");
        let config = serde_json::json!({ "bos_token": "^", "eos_token": { "content": "$" },
                                         "chat_template": template });
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string())
            .expect("written");
        Tokenizer::open(folder.path()).expect("a tokenizer")
    }

    const TURNS: &str = "{{ bos_token }}{% for message in messages %}\n\
        {% if message['role'] not in ['user', 'assistant'] %}\n\
        {{ raise_exception('who is ' ~ message.role ~ '?') }}\n{% endif %}\n\
        [{{ message.role }}]{{ message.content.strip() }}{{ eos_token if message.role == 'assistant' }}\n\
        {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

    #[test]
    fn a_template_of_the_folder_is_followed_and_an_answer_is_what_its_message_adds() {
        let said = [("user", " hi "), ("assistant", "yo "), ("user", "so"), ("assistant", "no")];
        let all = "^[user]hi\n[assistant]yo$\n[user]so\n[assistant]no$\n";
        let found = tried(&with_template(TURNS), &said).expect("tokens");
        assert_eq!(found, (all.into(), "yo$no$".into()));
    }

    #[test]
    fn a_template_that_says_where_answers_are_is_believed() {
        let marked = "{% for m in messages %}<{{ m.role }}>\n{%- if m.role == 'assistant' %}\n\
            {%- generation %}\n{{ m.content }}$\n{%- endgeneration -%}\n\
            {% else %}{{ m.content }}{% endif %}{% endfor %}";
        let said = [("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "no")];
        let all = "<user>hi<assistant>yo$<user>so<assistant>no$";
        let found = tried(&with_template(marked), &said).expect("tokens");
        assert_eq!(found, (all.into(), "yo$no$".into()));
    }

    #[test]
    fn a_template_that_cannot_be_read_or_followed_is_named_with_its_line() {
        let said = [("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "no")];
        let last = "{{ messages[-1].content }}";
        for (template, said, words) in [
            ("one\n{% for %}", &said[..], "tokenizer_config.json, line 2: "),
            (TURNS, &[("system", "x")], "tokenizer_config.json, line 3: who is system?: mend it"),
            ("{{ messages[7].content.oh() }}", &said, "tokenizer_config.json, line 1: "),
            (last, &said, "writes message 2 differently if others follow it"),
        ] {
            let error = tried(&with_template(template), said).expect_err(template).to_string();
            assert!(error.contains(words), "{error}");
            assert!(error.contains("take it out"), "{error}");
        }
    }
}
