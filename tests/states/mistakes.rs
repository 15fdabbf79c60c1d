//! Mistakes of users: each ends the pod with one sentence that says what to do, and with the exit
//! status of the reference image.

use anyhow::{Context as _, Result, ensure};
use transom_tests::place::last_line;
use transom_tests::program::PATIENCE;

use super::runs_here;
use super::server::serve;
use super::world::{Files, World, each};

/// One mistake in each paragraph.
const MISTAKES: &str = include_str!("mistakes.txt");

#[derive(Debug, Default)]
struct Mistake {
    /// A script in the folder of the volume.
    volume: String,
    /// A script in the pod's mounts and network.
    place: String,
    words: Vec<(String, String)>,
    status: i32,
    sentence: String,
}

impl Mistake {
    fn read(paragraph: &str) -> Result<Self> {
        let mut mistake = Self::default();
        for line in paragraph.lines() {
            let starts_with_digit = line.starts_with(|it: char| it.is_ascii_digit());
            if let Some(script) = line.strip_prefix("volume: ") {
                mistake.volume = script.to_owned();
            } else if let Some(script) = line.strip_prefix("place: ") {
                mistake.place = script.to_owned();
            } else if starts_with_digit {
                let (status, sentence) = line.split_once(' ').context("a sentence")?;
                mistake.status = status.parse()?;
                mistake.sentence = sentence.replace("\\t", "\t");
            } else {
                let (name, value) = line.split_once('=').context("NAME=VALUE")?;
                mistake.words.push((name.to_owned(), value.replace("\\t", "\t")));
            }
        }
        ensure!(mistake.status != 0, "no status: {paragraph}");
        Ok(mistake)
    }
}

#[test]
fn each_mistake_is_one_sentence_with_the_status_of_the_reference() -> Result<()> {
    if !runs_here("mistakes of users") {
        return Ok(());
    }
    let files = Files::make()?;
    let paragraphs = MISTAKES.split("\n\n").filter(|it| !it.starts_with('#'));
    let mistakes: Vec<_> = paragraphs.map(|it| Mistake::read(it.trim())).collect::<Result<_>>()?;
    ensure!(mistakes.len() > 80, "{} mistakes", mistakes.len());
    each(&mistakes, |mistake| {
        let world = World::new(&files)?;
        serve(world.place.listen(9000)?);
        let _microsoft = world.microsoft(9001)?;
        world.run(&mistake.volume)?;
        let words = mistake.words.iter().map(|(name, value)| (&**name, &**value));
        let mut pod = world.start(&mistake.place, &words.collect::<Vec<_>>())?;
        let ended = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        ensure!(ended == mistake.status, "{mistake:?}: {ended}: {}{said}", pod.stdout.text());
        ensure!(fits(&said, &mistake.sentence), "{mistake:?}: {said}");
        ensure!(world.machine()?.is_none(), "{mistake:?}: a machine started");
        Ok(())
    })
}

/// Whether a line is this sentence of `transom`, in which `…` stands for anything.
fn fits(line: &str, sentence: &str) -> bool {
    let Some(said) = line.strip_prefix("transom: ") else { return false };
    match sentence.split_once('…') {
        None => said == sentence,
        Some((start, end)) => said.starts_with(start) && said.ends_with(end),
    }
}
