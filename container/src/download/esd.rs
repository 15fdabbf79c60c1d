//! Microsoft's catalog of upgrade images (ESD): a cabinet with `products.xml`.
//!
//! It gives the link, the length and the checksum of the image of an edition and a language. The
//! address has no TLS in the catalog: the checksum, which comes from Microsoft with TLS, protects
//! the file.

use super::ask::{Link, MAX_CATALOG, Question, Reply, Step, Way, is_microsofts};
use super::cab;
use super::digest::Checksum;
use super::fault::Fault;
use crate::media::xml;

const WHOM: &str = "Microsoft's catalog of upgrade images";
const LIST: &str = "products.xml";
/// Longer values are none.
const MAX_VALUE: usize = 2048;

/// The way to an upgrade image.
pub struct Esd {
    /// The number of the link to the catalog.
    pub catalog: u32,
    /// As in `Professional`.
    pub edition: &'static str,
    /// Language and country, as in `ko-KR`.
    pub culture: &'static str,
}

impl Way for Esd {
    fn first(&self) -> Question {
        let url = format!("https://go.microsoft.com/fwlink?linkid={}", self.catalog);
        Question { limit: MAX_CATALOG, ..Question::new(url) }
    }

    fn next(&mut self, reply: &Reply) -> Result<Step, Fault> {
        let body = reply.good(WHOM)?;
        let list = cab::file(body, LIST);
        let list = list.map_err(|error| Fault::last(format!("{WHOM}: {error:#}")))?;
        let text = String::from_utf8_lossy(&list);
        let link = find(&text, self.edition, self.culture);
        link.map(Step::Found).ok_or_else(|| {
            let what = format!("{} in {}", self.edition, self.culture);
            Fault::last(format!("{WHOM} has no {what}"))
        })
    }
}

/// The image for 64-bit PCs of an edition and a language.
pub fn find(list: &str, edition: &str, culture: &str) -> Option<Link> {
    let files = list.split("<File ").skip(1).chain(list.split("<File>").skip(1));
    files.filter_map(|file| file.split("</File>").next()).find_map(|file| {
        let is = |name: &str, wanted: &str| {
            value(file, name).is_some_and(|it| it.eq_ignore_ascii_case(wanted))
        };
        let fits =
            is("Architecture", "x64") && is("Edition", edition) && is("LanguageCode", culture);
        let url = xml::unescape(value(file, "FilePath").filter(|_| fits)?).ok()?;
        let url = with_tls(&url);
        let length = value(file, "Size").and_then(|text| text.parse().ok());
        let long = value(file, "Sha256").and_then(|text| Checksum::sha256(text).ok());
        let short = || value(file, "Sha1").and_then(|text| Checksum::sha1(text).ok());
        let checksum = Some(long.or_else(short)?);
        is_microsofts(&url).then_some(Link { url, referer: None, length, checksum })
    })
}

fn with_tls(url: &str) -> String {
    url.strip_prefix("http://").map_or_else(|| url.to_owned(), |rest| format!("https://{rest}"))
}

/// The text of an element without further elements.
fn value<'a>(file: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = file.split_once(&format!("<{name}>"))?;
    let text = rest.split('<').next()?.trim();
    (!text.is_empty() && text.len() <= MAX_VALUE).then_some(text)
}

#[cfg(test)]
mod test {
    use super::*;

    const LIST: &str = "<MCT><File id=\"1\"><FileName>a.esd</FileName><LanguageCode>de-de\
        </LanguageCode><Edition>Professional</Edition><Architecture>ARM64</Architecture>\
        <FilePath>http://dl.delivery.mp.microsoft.com/arm.esd</FilePath></File>\
        <File id=\"2\"><LanguageCode>de-de</LanguageCode><Edition>Professional</Edition>\
        <Architecture>x64</Architecture><Size>4000000000</Size><Sha256>\
        193bbde65ec84e298a1c798959489c8375ed501cf973c6d37fa52bb22ee8d43b</Sha256>\
        <FilePath>http://dl.delivery.mp.microsoft.com/x64.esd?a=1&amp;b=2</FilePath></File>\
        <File id=\"3\"><LanguageCode>fr-fr</LanguageCode><Edition>Professional</Edition>\
        <Architecture>x64</Architecture><FilePath>http://evil.example/x64.esd</FilePath></File>";

    fn way() -> Esd {
        Esd { catalog: 2_156_292, edition: "Professional", culture: "de-DE" }
    }

    #[test]
    fn the_image_of_edition_and_language_is_found() {
        let link = find(LIST, "Professional", "de-DE").unwrap();
        assert_eq!(link.url, "https://dl.delivery.mp.microsoft.com/x64.esd?a=1&b=2");
        assert_eq!(link.length, Some(4_000_000_000));
        assert!(link.checksum.is_some());
        assert_eq!(find(LIST, "Enterprise", "de-DE"), None);
        assert_eq!(find(LIST, "Professional", "fr-FR"), None, "not a server of Microsoft's");
        assert!(way().first().url.ends_with("linkid=2156292"));
    }

    #[test]
    fn each_refusal_is_a_sentence() {
        let of = |status, body: &[u8]| {
            way()
                .next(&Reply { status, body: body.into(), ..Reply::default() })
                .unwrap_err()
                .to_string()
        };
        assert!(of(403, b"").contains("refused the request"));
        assert!(of(500, b"").contains("status 500"));
        assert!(of(200, b"<html>Log in</html>").contains("not a cabinet"));
        assert!(of(200, b"").contains("not a cabinet"));
    }
}
