//! Parses arbitrary client messages, complete and in parts.

use host::clipboard::MAX_TEXT_BYTES;
use screen::rfb::clipboard::{self, ClipboardMessage};
use screen::rfb::format::PixelFormat;
use screen::rfb::message::{self, Message};
use screen::rfb::preferences::Preferences;

/// Parses messages and their contents until the input ends or is invalid. Returns how many.
pub(crate) fn read(bytes: &[u8]) -> usize {
    let Some((kind, mut rest)) = bytes.split_first() else { return 0 };
    if kind % 4 == 3 {
        text(rest);
    }
    let (more_buttons, mut count) = (kind % 2 == 1, 0);
    while let Ok(Some((message, used))) = message::parse(rest, more_buttons) {
        assert!(used > 0 && used <= rest.len(), "{used} of {} bytes", rest.len());
        whole(&rest[..used], more_buttons, &message);
        look(message);
        rest = &rest[used..];
        count += 1;
    }
    count
}

/// Checks that a message is parsed from its exact bytes, and from no fewer.
fn whole(bytes: &[u8], more_buttons: bool, message: &Message) {
    let again =
        message::parse(bytes, more_buttons).expect("a valid message").expect("a complete one");
    assert_eq!((&again.0, again.1), (message, bytes.len()));
    for end in [bytes.len() - 1, bytes.len() / 2] {
        let part = message::parse(&bytes[..end], more_buttons);
        assert!(matches!(part, Ok(None)), "{end} of {} bytes: {part:?}", bytes.len());
    }
}

fn look(message: Message) {
    match message {
        Message::PixelFormat(format) => {
            assert_eq!(
                PixelFormat::read(&format.write()).ok().map(|it| it.write()),
                Some(format.write())
            );
        }
        Message::Encodings(numbers) => {
            let preferences = Preferences::read(&numbers);
            for slow in [0, 9, 255] {
                let parameters = preferences.parameters(slow);
                assert!(parameters.compression <= 9 && parameters.quality.is_none_or(|it| it <= 9));
            }
        }
        Message::CutText(bytes) => {
            assert!(bytes.len() <= MAX_TEXT_BYTES);
            clipboard::from_latin(&bytes);
        }
        Message::Clipboard(bytes) => text(&bytes),
        Message::TooLong(length) => assert!(length > MAX_TEXT_BYTES),
        Message::Fence { payload, .. } => assert!(payload.len() <= 64),
        _ => {}
    }
}

fn text(bytes: &[u8]) {
    match clipboard::read(bytes) {
        Ok(ClipboardMessage::Provide(text)) => {
            assert!(clipboard::is_text(bytes) && text.len() <= MAX_TEXT_BYTES);
        }
        Ok(_) => {}
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
