//! Microsoft's evaluation centre: one page, with a link for each language and medium.

use super::ask::{Link, Question, Reply, Step, Way, is_page};
use super::fault::Fault;
use crate::media::xml;

const WHOM: &str = "Microsoft's evaluation centre";
const FORWARD: &str = "https://go.microsoft.com/fwlink";
/// Longer links are none.
const MAX_LINK: usize = 300;

/// The way to an evaluation medium.
pub struct Evaluation {
    /// End of the page's address, as in `windows-server-2025`.
    page: &'static str,
    /// Language and country, as in `ko-KR`.
    culture: &'static str,
    /// The link among those of the culture, from 0: pages with several media have several.
    number: usize,
}

impl Evaluation {
    pub fn new(page: &'static str, culture: &'static str, number: usize) -> Self {
        Self { page, culture, number }
    }
}

impl Way for Evaluation {
    fn first(&self) -> Question {
        let site = "https://www.microsoft.com/en-us/evalcenter";
        Question::new(format!("{site}/download-{}", self.page))
    }

    fn next(&mut self, reply: &Reply) -> Result<Step, Fault> {
        let body = reply.good(WHOM)?;
        if !is_page(body) {
            return Err(Fault::last(format!("{WHOM} sent something else than its page")));
        }
        let text = String::from_utf8_lossy(body);
        let mut links: Vec<String> = Vec::new();
        for link in text.split(FORWARD).skip(1) {
            let link = link.split(['"', '\'', '<', '>', ' ']).next().unwrap_or_default();
            // HTML allows a bare & in a link.
            let link = xml::unescape(link).unwrap_or_else(|_| link.to_owned());
            if is_of(&link, self.culture) && !links.iter().any(|it| it.eq_ignore_ascii_case(&link))
            {
                links.push(link);
            }
        }
        let Some(link) = links.into_iter().nth(self.number) else {
            let what = format!("no link for {} on its page {}", self.culture, self.page);
            return Err(Fault::last(format!("{WHOM} has {what}")));
        };
        let url = format!("{FORWARD}{link}");
        Ok(Step::Found(Link { url, referer: None, length: None, checksum: None }))
    }
}

/// Whether a link, from its path on, is for this culture, as in
/// `/p/?LinkID=1&clcid=…&culture=…&country=…`.
fn is_of(link: &str, culture: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/?&=-_".contains(&byte);
    let (path, query) = link.split_once('?').unwrap_or((link, ""));
    let value = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    };
    let is =
        |name: &str, wanted: &str| value(name).is_some_and(|it| it.eq_ignore_ascii_case(wanted));
    let country = culture.rsplit('-').next().unwrap_or_default();
    let number = value("LinkID").is_some_and(|it| it.bytes().all(|digit| digit.is_ascii_digit()));
    link.len() <= MAX_LINK
        && link.bytes().all(plain)
        && ["", "/", "/p", "/p/"].contains(&path)
        && number
        && is("culture", culture)
        && is("country", country)
}

#[cfg(test)]
mod test {
    use super::*;

    const PAGE: &str = "<html>\
        <a href=\"https://go.microsoft.com/fwlink/p/?LinkID=1&amp;clcid=0x409&amp;culture=en-us&amp;country=us\">\
        <a href=\"https://go.microsoft.com/fwlink/p/?LinkID=1&clcid=0x409&culture=en-us&country=US\">\
        <a href=\"https://go.microsoft.com/fwlink/p/?linkid=2&clcid=0x409&culture=en-us&country=us\">\
        <a href='https://go.microsoft.com/fwlink/?LinkID=3&culture=ko-kr&country=kr'>\
        <a href=\"https://go.microsoft.com/fwlink/p/?LinkID=x4&culture=de-de&country=de\">\
        <a href=\"https://go.microsoft.com/fwlink.evil.example/?LinkID=4&culture=de-de&country=de\">";

    fn found(culture: &'static str, number: usize, reply: &Reply) -> Result<String, String> {
        let mut way = Evaluation::new("windows-11-enterprise", culture, number);
        assert!(way.first().url.ends_with("/evalcenter/download-windows-11-enterprise"));
        match way.next(reply) {
            Ok(Step::Found(link)) => Ok(link.url),
            Ok(Step::Ask(question)) => Err(question.url),
            Err(fault) => Err(fault.to_string()),
        }
    }

    #[test]
    fn the_page_has_a_link_for_each_language_and_medium() {
        let page = Reply { status: 200, body: PAGE.into() };
        assert!(found("en-US", 0, &page).unwrap().contains("LinkID=1&clcid"));
        assert!(found("ko-KR", 0, &page).unwrap().contains("LinkID=3"));
        // The same link twice, in other letters, is one medium.
        assert!(found("en-US", 1, &page).unwrap().contains("linkid=2"));
        assert!(found("de-DE", 0, &page).unwrap_err().contains("no link for de-DE"));
    }

    #[test]
    fn each_refusal_is_a_sentence() {
        let of = |status, body: &str| {
            found("en-US", 0, &Reply { status, body: body.into() }).unwrap_err()
        };
        assert!(of(403, "").contains("refused the request"));
        assert!(of(404, "").contains("has moved"));
        assert!(of(500, "").contains("status 500"));
        assert!(of(200, "{}").contains("something else"));
        assert!(of(200, "<html>Are you a robot?</html>").contains("no link for en-US"));
    }
}
