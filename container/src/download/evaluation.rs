//! Microsoft's evaluation centre: one page, with a link for each language and medium.

use super::ask::{Link, Question, Reply, Step, Way, is_page};
use super::fault::Fault;
use crate::media::xml;

const WHOM: &str = "Microsoft's evaluation centre";
const FORWARD: &str = "https://go.microsoft.com/fwlink";
/// Longer links are none.
const MAX_LINK: usize = 300;

/// Links whose language is looked for.
const MAX_LINKS: usize = 60;
/// Cultures that addresses of files write in other ways, too.
const OTHER_NAMES: [(&str, &str); 2] = [("ja-jp", "jp-jp"), ("zh-tw", "cn-tw")];

/// The way to an evaluation medium.
pub struct Evaluation {
    /// End of the page's address, as in `windows-server-2025`.
    page: &'static str,
    /// Language and country, as in `ko-KR`.
    culture: &'static str,
    /// The link among those of the culture, from 0: pages with several media have several.
    number: usize,
    /// Links that do not tell their language, the last first. It is asked where each leads.
    untold: Vec<String>,
}

impl Evaluation {
    pub fn new(page: &'static str, culture: &'static str, number: usize) -> Self {
        Self { page, culture, number, untold: Vec::new() }
    }

    /// The first link of which it is not known where it leads.
    fn ask(&self) -> Result<Step, Fault> {
        let link = self.untold.last().ok_or_else(|| {
            let what = format!("no link for {} on its page {}", self.culture, self.page);
            Fault::last(format!("{WHOM} has {what}"))
        })?;
        Ok(Step::Ask(Question::redirection(format!("{FORWARD}{link}"))))
    }

    /// Whether a file at this address is of the culture.
    fn leads_to(&self, address: &str) -> bool {
        let culture = self.culture.to_ascii_lowercase();
        let other = OTHER_NAMES.iter().find(|(usual, _)| *usual == culture);
        let names = [Some(&*culture), other.map(|(_, other)| *other)];
        let path = address.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
        let path = path.and_then(|(_, path)| path.split(['?', '#']).next()).unwrap_or_default();
        let words: Vec<_> = path.split(|it: char| !it.is_ascii_alphanumeric()).collect();
        let is_named = |pair: &[&str]| {
            let name = pair.join("-").to_ascii_lowercase();
            names.contains(&Some(&*name))
        };
        words.windows(2).any(is_named)
    }
}

impl Way for Evaluation {
    fn first(&self) -> Question {
        let site = "https://www.microsoft.com/en-us/evalcenter";
        Question::new(format!("{site}/download-{}", self.page))
    }

    fn next(&mut self, reply: &Reply) -> Result<Step, Fault> {
        if let Some(link) = self.untold.pop() {
            // A link that is missing for now would make another medium the first.
            if matches!(reply.status, 403 | 429 | 500..) {
                reply.good(WHOM)?;
            }
            let leads = reply.location.as_deref().is_some_and(|it| self.leads_to(it));
            return match (leads, self.number) {
                (true, 0) => Ok(found(&link)),
                _ => {
                    self.number -= usize::from(leads);
                    self.ask()
                }
            };
        }
        let body = reply.good(WHOM)?;
        if !is_page(body) {
            return Err(Fault::last(format!("{WHOM} sent something else than its page")));
        }
        let all = links(&String::from_utf8_lossy(body));
        let mut own = all.iter().filter(|link| is_of(link, self.culture));
        if let Some(link) = own.nth(self.number) {
            return Ok(found(link));
        }
        // Some pages have the same language in all links.
        self.untold = all.into_iter().take(MAX_LINKS).rev().collect();
        self.ask()
    }
}

fn found(link: &str) -> Step {
    let url = format!("{FORWARD}{link}");
    Step::Found(Link { url, referer: None, length: None, checksum: None })
}

/// The links of a page, each once, from their paths on.
fn links(page: &str) -> Vec<String> {
    let mut links: Vec<String> = Vec::new();
    for link in page.split(FORWARD).skip(1) {
        let link = link.split(['"', '\'', '<', '>', ' ']).next().unwrap_or_default();
        // HTML allows a bare & in a link.
        let link = xml::unescape(link).unwrap_or_else(|_| link.to_owned());
        if is_link(&link) && !links.iter().any(|it| it.eq_ignore_ascii_case(&link)) {
            links.push(link);
        }
    }
    links
}

/// Whether this is a link, as in `/p/?LinkID=1&clcid=…&culture=…&country=…`.
fn is_link(link: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/?&=-_".contains(&byte);
    let path = link.split('?').next().unwrap_or_default();
    let number = value(link, "LinkID");
    link.len() <= MAX_LINK
        && link.bytes().all(plain)
        && ["", "/", "/p", "/p/"].contains(&path)
        && number.is_some_and(|it| it.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Whether a link says that it is for this culture.
fn is_of(link: &str, culture: &str) -> bool {
    let is = |name: &str, wanted: &str| {
        value(link, name).is_some_and(|it| it.eq_ignore_ascii_case(wanted))
    };
    is("culture", culture) && is("country", culture.rsplit('-').next().unwrap_or_default())
}

fn value<'a>(link: &'a str, name: &str) -> Option<&'a str> {
    let (_, query) = link.split_once('?')?;
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value)
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

    /// Goes on until there is a link. Each forward leads to an address with its number.
    fn link(
        culture: &'static str,
        number: usize,
        reply: &Reply,
        leads: impl Fn(&str) -> (u16, Option<String>),
    ) -> Result<String, String> {
        let mut way = Evaluation::new("windows-11-enterprise", culture, number);
        assert!(way.first().url.ends_with("/evalcenter/download-windows-11-enterprise"));
        let mut step = way.next(reply);
        for _ in 0..64 {
            match step {
                Ok(Step::Found(link)) => return Ok(link.url),
                Ok(Step::Ask(question)) => {
                    assert!(!question.follows);
                    let (status, location) = leads(&question.url);
                    step = way.next(&Reply { status, location, ..Reply::default() });
                }
                Err(fault) => return Err(fault.to_string()),
            }
        }
        panic!("it asks too often")
    }

    fn found(culture: &'static str, number: usize, reply: &Reply) -> Result<String, String> {
        link(culture, number, reply, |_| (404, None))
    }

    #[test]
    fn a_link_that_does_not_tell_its_language_is_known_by_where_it_leads() {
        let links = (1..100).map(|number| {
            format!("<a href=\"{FORWARD}/?LinkID={number}&culture=en-us&country=us\">")
        });
        let body = format!("<html>{}", links.collect::<String>()).into_bytes();
        let page = Reply { status: 200, body, location: None };
        let leads = |url: &str| {
            let number = url.split(['=', '&']).nth(1).unwrap();
            let name = match number {
                "3" => "x_ko-kr.iso",
                "4" => "ko-kr/LTSC.iso?x=1",
                "5" => "DE-DE.iso",
                "6" => "SERVER_JP-JP_x64.iso",
                "7" => "x.iso?culture=fr-fr",
                "8" => return (200, None),
                "9" => "dede/de/x_de_LTSC_DE.iso",
                "10" => "ja/DE-CH.iso",
                "11" => return (503, None),
                _ => "en-us.iso",
            };
            (302, Some(format!("https://de-de.example/{number}/{name}")))
        };
        let found = |culture, number| link(culture, number, &page, leads);
        assert!(found("ko-KR", 0).unwrap().contains("LinkID=3&"));
        assert!(found("ko-KR", 1).unwrap().contains("LinkID=4&"));
        // A link may be missing because the server is busy: another one would be another medium.
        assert!(found("ko-KR", 2).unwrap_err().contains("status 503"));
        assert!(found("de-DE", 0).unwrap().contains("LinkID=5&"));
        assert!(found("ja-JP", 0).unwrap().contains("LinkID=6&"));
        assert!(found("fr-FR", 0).unwrap_err().contains("status 503"));
        assert!(found("de-DE", 1).unwrap_err().contains("status 503"));
        assert!(found("en-US", 1).unwrap().contains("LinkID=2&"), "it is believed");
    }

    #[test]
    fn the_page_has_a_link_for_each_language_and_medium() {
        let page = Reply { status: 200, body: PAGE.into(), ..Reply::default() };
        assert!(found("en-US", 0, &page).unwrap().contains("LinkID=1&clcid"));
        assert!(found("ko-KR", 0, &page).unwrap().contains("LinkID=3"));
        // The same link twice, in other letters, is one medium.
        assert!(found("en-US", 1, &page).unwrap().contains("linkid=2"));
        assert!(found("de-DE", 0, &page).unwrap_err().contains("no link for de-DE"));
    }

    #[test]
    fn each_refusal_is_a_sentence() {
        let of = |status, body: &str| {
            found("en-US", 0, &Reply { status, body: body.into(), ..Reply::default() }).unwrap_err()
        };
        assert!(of(403, "").contains("refused the request"));
        assert!(of(404, "").contains("has moved"));
        assert!(of(500, "").contains("status 500"));
        assert!(of(200, "{}").contains("something else"));
        assert!(of(200, "<html>Are you a robot?</html>").contains("no link for en-US"));
    }
}
